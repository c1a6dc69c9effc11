"""The `sglang` engine: a server process of its own for each replica, spoken to by HTTP.

Nothing of SGLang is imported: it lives in an environment with pins of its own, and a crash of it is an exit
code here. `flags` says how a server is started, `guard` and `process` start it and end it with the run,
`client` speaks to it, `requests`, `pictures` and `answers` translate, `model` knows what its weights look
like, and `engine` is the engine.
"""
