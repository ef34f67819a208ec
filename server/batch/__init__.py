"""`jaxserve batch`: a file of requests, answered as fast as the engine can, in OpenAI's batch format.

Nothing is imported here: whoever lists the commands imports `command`, and is to be spared the rest.
"""
