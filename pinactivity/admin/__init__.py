"""What the admins of all apps share; importing it names the site."""

from django.contrib import admin

admin.site.site_header = admin.site.site_title = "pinactivity"
admin.site.index_title = "User activity"
