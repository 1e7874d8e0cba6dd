// Package cufileapi is the API of cuFile (GPUDirect Storage): one method for each C
// function, with the C names without their cuFile prefix, C types and no policy.
//
// API is the interface that package gds programs against. Lib calls the loaded
// libcufile.so.0; the virtual devices implement the same interface over virtual device
// memory and real files. A function that the loaded library lacks returns MissingSymbol.
//
// This package configures nothing. cuFile is configured by parameters that are set before
// DriverOpen, by the environment (CUFILE_ENV_PATH_JSON and others) and by
// /etc/cufile.json, in this order of precedence. Unless one of these sets another path,
// the library writes cufile.log into the working directory of the process.
//
// Calls may be made from any thread at the same time. Calls with device memory need the
// context of its device bound to the calling thread. No call is ordered with streams.
package cufileapi
