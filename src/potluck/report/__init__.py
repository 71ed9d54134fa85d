"""Shows a run to people: views while it runs, summary and loss curve afterwards.

It reads only events, and never sees a token.
"""
