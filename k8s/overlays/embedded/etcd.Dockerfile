# Debian's etcd 3.4.23: the release that the crash tests run on, and one that keeps committed data when it is killed.
#   docker build -f k8s/overlays/embedded/etcd.Dockerfile -t segue-etcd:3.4.23 k8s/overlays/embedded
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends etcd-server && rm -rf /var/lib/apt/lists/*
# etcd 3.4 starts on arm64 only when told to; elsewhere it ignores this.
ENV ETCD_UNSUPPORTED_ARCH=arm64
USER 65532:65532
EXPOSE 2379
ENTRYPOINT ["etcd"]
