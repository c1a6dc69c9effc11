"""Runs inside SGLang, which has a way for processors of others: SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE."""
