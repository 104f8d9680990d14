"""The catalog: durable, decision-grade facts in etcd, and the only client of it."""
