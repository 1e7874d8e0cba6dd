// Package archtest keeps the house in order: its test fails when a package
// imports upwards, when a module gets a second importer, and when a package is
// missing from the table of layers.
package archtest
