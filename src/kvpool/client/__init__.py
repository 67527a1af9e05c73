"""A client of servers with OpenAI's interface: answers as they come, load and its figures (extra `client`)."""
