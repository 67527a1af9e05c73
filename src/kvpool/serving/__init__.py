"""An engine behind OpenAI's HTTP interface: a thread that steps, texts, and the server."""
