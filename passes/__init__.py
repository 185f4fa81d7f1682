"""Graph rewrites, one a file; their order and the reasons for it stand in `pcp_compiler/pipeline.py`."""

if __name__ != "pcp_compiler.passes":
    raise ImportError("import pcp_compiler.passes, not passes: a second copy would not share state with the first")
