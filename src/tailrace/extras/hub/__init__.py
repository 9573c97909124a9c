"""For whoever shares a trained model: `tailrace push` uploads it to the Hugging Face hub."""
