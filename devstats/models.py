"""Who may open the page of dev-stats, and on behalf of whom."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from pinactivity.core.ids import NIL


class DeveloperAccess(models.Model):
    """A user may see the statistics of a developer. Without such a row they see nobody's."""

    # The foreign key is ours, by name (migration 0001); its index is the unique constraint's.
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="+",
        db_constraint=False,
        db_index=False,
    )
    developer_id = models.UUIDField("developer id", help_text="The building developer's UUID.")

    class Meta:
        db_table = "developer_access"
        verbose_name_plural = "developer access"
        constraints = (
            models.UniqueConstraint(
                fields=["user", "developer_id"], name="ux_developer_access_user_developer"
            ),
            models.CheckConstraint(
                name="chk_developer_access_developer_not_nil",
                condition=~Q(developer_id=NIL),
                violation_error_message="The nil UUID stands for an unknown developer.",
            ),
        )

    def __str__(self) -> str:
        return f"{self.user} reads {self.developer_id}"
