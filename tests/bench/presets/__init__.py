"""How `tltlab/costs` got its presets: fits to published measurements, and their errors.

The measurements are tables of other people: AIConfigurator's kernel and server times and SpecBundle's runs (Apache-2.0,
MIT), EfficientRollout's and LLMServingSim's step times, and figures of the papers of TLT (arXiv 2511.16665) and EAGLE-3
(arXiv 2503.01840). Not all have a licence, so they are not in the repository: `--data` names their folder.
`roofline.presets` makes the presets of one GPU and model, `profiles.shipped` makes `profiles.json`. The preset
`h100-qwen2.5-32b-tp4-table` is kept as it was made of kernel times; its notes say how.
"""
