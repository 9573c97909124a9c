from tailrace.compiling import kernel


def test_a_kernel_that_cannot_be_kept_on_disk_is_compiled_all_the_same() -> None:
    namespace: dict[str, object] = {}
    exec("def double(x): return 2 * x", namespace)  # it has no file, so numba finds no cache folder for it
    assert kernel("(int64,)")(namespace["double"])(21) == 42
