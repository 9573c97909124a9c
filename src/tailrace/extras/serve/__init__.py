"""For clients of the OpenAI API: `tailrace serve` over the embedded engine."""
