"""Products by either library against torch in double precision."""

import pytest
import torch
from torch import Tensor

from tailrace import products
from tailrace.products import add_product, multiply


@pytest.fixture(params=[True, False], ids=["by numpy", "by torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BY_NUMPY", request.param)


def matrix(num_rows: int, num_columns: int, seed: int) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 3, 2), (48, 96, 256), (300, 7, 64)])
def test_a_product_is_that_of_its_matrices_however_they_lie_in_memory(
    rows: int, inner: int, columns: int, num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    a, b = matrix(rows, inner, 0), matrix(inner, columns, 1)
    wanted = (a.double() @ b.double()).float()
    padded = torch.zeros(inner, columns + 16)
    padded[:, :columns] = b
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T, padded[:, :columns]):
            torch.testing.assert_close(multiply(left, right), wanted, atol=2e-5, rtol=1e-5)
    torch.set_num_threads(before)


@pytest.mark.usefixtures("library")
def test_a_product_is_written_or_added_to_where_it_is_to_be() -> None:
    a, b, out = matrix(5, 4, 0), matrix(4, 3, 1), torch.full((5, 3), 7.0)
    wanted = a @ b
    assert multiply(a, b, out=out) is out
    torch.testing.assert_close(out, wanted)
    assert add_product(a, b, out, room=torch.empty(5, 3)) is out
    torch.testing.assert_close(out, 2 * wanted)
    assert add_product(a, b, out) is out
    torch.testing.assert_close(out, 3 * wanted)
