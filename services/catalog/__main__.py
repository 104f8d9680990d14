"""`python -m services.catalog`."""

from libs.service.lifecycle import main
from services.catalog.server import build
from services.catalog.settings import CatalogSettings

if __name__ == "__main__":
    main(CatalogSettings, build)
