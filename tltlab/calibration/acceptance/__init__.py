"""Acceptance models fitted to recorded or counterfactual drafts."""
