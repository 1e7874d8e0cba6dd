// Package status describes one process of a job for `chorus status`: the progress of its
// collectives and the memory of its devices. Packages register sources. The sources run only
// when the coordinator asks, so that operations do not pay for them.
package status
