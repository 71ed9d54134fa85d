"""The page in the browser: its content, its files, and the process that serves it."""
