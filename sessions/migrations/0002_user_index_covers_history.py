from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('activity_sessions', '0001_initial'),
    ]

    operations = [
        migrations.RemoveIndex(model_name='session', name='ix_sessions_user'),
        migrations.AddIndex(
            model_name='session',
            index=models.Index(condition=models.Q(('user_id__isnull', False)), fields=['user_id', '-created_at'], include=('last_activity_at', 'id'), name='ix_sessions_user'),
        ),
    ]
