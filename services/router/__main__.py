"""`python -m services.router`."""

from libs.service.lifecycle import main
from services.router.server import build
from services.router.settings import RouterSettings

if __name__ == "__main__":
    main(RouterSettings, build)
