from django.apps import AppConfig


class DevStatsConfig(AppConfig):
    name = "devstats"
    verbose_name = "Statistics for developers"
