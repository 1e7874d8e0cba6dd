// Package monitor shows the state of a running job: as a table, as JSON, as metrics of
// Prometheus, and as a page for browsers.
package monitor
