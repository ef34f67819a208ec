"""The OpenAI-compatible door: `app.build_app` makes it of a service, `options.HttpOptions` are its limits."""
