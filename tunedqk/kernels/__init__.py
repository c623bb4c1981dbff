"""The kernels: `vectorized` is fast and tuned, `loop` is plain and is what the fast one is judged by."""
