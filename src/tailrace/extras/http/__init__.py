"""For runs on GPUs: engines behind vLLM, SGLang or PipelineRL servers."""
