"""One control plane for jobs of any kind: schema, store, keeper, scheduler, HTTP API and client."""
