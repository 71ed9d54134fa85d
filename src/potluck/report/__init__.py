"""What a person sees of a run: views while it runs, summary and loss curve afterwards.

It reads events and nothing else: it does not know how training, hub or wire work, and never sees a token.
"""
