// Package chart draws charts as SVG, which is readable on light and dark backgrounds. The
// SVG needs no network.
package chart
