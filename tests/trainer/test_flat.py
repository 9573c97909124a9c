import torch

from tailrace.trainer.flat import follow, gather_gradients, move, num_elements


def make_parameters() -> list[torch.Tensor]:
    return [torch.full((2, 3), 1.0, requires_grad=True), torch.full((4,), 2.0, requires_grad=True)]


def test_what_moved_to_a_vector_is_followed_by_others() -> None:
    mine, theirs = make_parameters(), make_parameters()
    vector = torch.zeros(num_elements(mine))
    follow(theirs, vector)
    assert not any(parameter.any() for parameter in theirs)
    move(mine, vector)
    assert vector.tolist() == [1.0] * 6 + [2.0] * 4
    with torch.no_grad():
        mine[1] += 5.0
    assert theirs[0].tolist() == [[1.0] * 3] * 2
    assert theirs[1].tolist() == [7.0] * 4


def test_gradients_add_up_in_the_vector() -> None:
    parameters = make_parameters()
    vector = torch.zeros(num_elements(parameters))
    gather_gradients(parameters, vector)
    for factor in (1.0, 2.0):
        (factor * parameters[0].sum() + factor * parameters[1].square().sum()).backward()
    assert vector.tolist() == [3.0] * 6 + [12.0] * 4
