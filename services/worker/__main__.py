"""`python -m services.worker`."""

from libs.service.lifecycle import main
from services.worker.server import build
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    main(WorkerSettings, build)
