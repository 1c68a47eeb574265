"""Judge of Ling-3 against numbers of the stock Hugging Face code: `python -m tests.golden.ling3 PATH`."""
