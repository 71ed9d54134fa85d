"""The page in the browser: what it shows, its files, and the process that serves it."""
