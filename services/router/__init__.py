"""The router: a thin asyncio shell around `libs.controller`'s router machine; see README.md."""
