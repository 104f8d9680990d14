"""HTTP ingress: the OpenAI API over the routers."""
