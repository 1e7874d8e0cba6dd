// Package cufileapi is the API of cuFile (GPUDirect Storage): one method for each C
// function, with the C names less their cuFile prefix, C widths and no policy.
//
// API is the interface that package gds programs against. Lib calls the loaded
// libcufile.so.0; the virtual devices implement the same interface over virtual
// device memory and real files. A function that the loaded library lacks returns
// MissingSymbol, and Has tells beforehand.
//
// This package sets nothing. What cuFile does is decided by parameters that are set
// before DriverOpen, by the environment (CUFILE_ENV_PATH_JSON and others) and by
// /etc/cufile.json, in this order. Unless one of them names another place, the
// library writes cufile.log into the working directory of the process.
//
// Calls may be made from any thread at the same time. Those that take device memory
// or a stream need the context of its device bound to the calling thread. Nothing
// is ordered with streams but ReadAsync and WriteAsync.
package cufileapi
