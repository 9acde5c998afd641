from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('views', '0002_view_stats'),
    ]

    operations = [
        migrations.RemoveIndex(model_name='propertyobjectview', name='ix_property_object_views_session'),
        migrations.AddIndex(
            model_name='propertyobjectview',
            index=models.Index(fields=['session', 'created_at'], include=('property_object_id', 'id'), name='ix_property_object_views_session'),
        ),
    ]
