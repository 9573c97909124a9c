from pathlib import Path

from tailrace.contracts.memory import ModelShape


def test_the_shape_of_a_model_is_read_from_its_folder(model_path: Path) -> None:
    shape = ModelShape.read(model_path)
    block = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32 + 2 * 8
    assert shape.block_parameters == block
    assert shape.outside_parameters == 24 * 32 + 32, "the tied head counts once"
    assert shape.num_parameters == 2 * block + 24 * 32 + 32
    assert (shape.num_layers, shape.query_size, shape.kv_size, shape.mlp_size) == (2, 32, 16, 48)
    assert (shape.num_heads * shape.head_size, shape.kv_bytes(2)) == (32, 2 * 2 * 2 * 16)
