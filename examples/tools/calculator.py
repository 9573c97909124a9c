"""The tool of examples/tools.toml."""

import math


def calculator(expression: str) -> str:
    """Multiply whole numbers.

    Args:
        expression: The product, for example "12 * 34".
    """
    return str(math.prod(int(factor) for factor in expression.split("*")))
