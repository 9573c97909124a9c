"""For models that start from given responses: `tailrace sft`."""
