"""The web application: the API, the live path and the pages, over the stores that are configured."""
