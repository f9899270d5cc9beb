"""The commands; installed under the import name `nestcli`. No logic lives here."""
