"""The Helm chart's values: their types, bounds, defaults and meaning (`values`), and the files of
`helm/headrace` that are made from them (`files`)."""
