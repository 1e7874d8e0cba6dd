// Package cufile implements the interface of cuFile over the memory of virtual devices
// and real files, like cuFile without nvidia-fs.
package cufile
