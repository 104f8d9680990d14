"""`python -m services.ingress`."""

from libs.service.lifecycle import main
from services.ingress.server import build
from services.ingress.settings import IngressSettings

if __name__ == "__main__":
    main(IngressSettings, build)
