from django.apps import AppConfig


class ViewsConfig(AppConfig):
    name = "views"
    verbose_name = "Property object views"
