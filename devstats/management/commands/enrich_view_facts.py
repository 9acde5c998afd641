"""manage.py enrich_view_facts"""

from typing import Any

from django.core.management.base import BaseCommand
from tqdm import tqdm

from devstats.enrichment import Enrichment
from devstats.management.storage import opened_writer


class Command(BaseCommand):
    help = (
        "Give the views that were stored while nobody knew their object's owner the owner that is"
        " known now; to be run after load_property_objects. Idempotent."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        with opened_writer() as writer:
            enrichment = Enrichment(writer)
            total = enrichment.count()
            with tqdm(total=total, desc="enrich", unit=" views", disable=None) as bar:
                added = enrichment.run(advance=bar.update)
        self.stdout.write(f"{added} views have got their owner")
