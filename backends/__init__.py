"""The torch.compile entry point and the executors that run a Program."""

if __name__ != "pcp_compiler.backends":
    raise ImportError("import pcp_compiler.backends, not backends: a second copy would not share state with the first")
