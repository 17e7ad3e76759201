"""Models of other libraries on this package's attention. Importing these modules imports none of those libraries."""
