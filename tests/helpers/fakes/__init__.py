"""Fake inference servers: the released HTTP interfaces of vLLM and SGLang before a model that is a checksum.

`server.py` serves one of them on a real socket. `generations.py` has what the versions have of their own,
`vllm.py` and `sglang.py` the routes, `model.py` the scheduler and the model, `page.py` the check of each
request against the schemas that `extract.py` has read out of the packages.
"""
