"""Runs inside SGLang's server, which has a way for models of others: SGLANG_EXTERNAL_MODEL_PACKAGE."""
