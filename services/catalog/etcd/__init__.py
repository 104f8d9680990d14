"""A thin etcd v3 client on aetcd's generated stubs."""
