"""Engines that are HTTP servers.

    ServerEngine (engine.py): a `GenerateBackend` over a `Server`, which a plug-in writes for its
        library: how it is started, and how it generates, aborts and loads weights
    HttpClient (http.py): requests and streamed answers
    ServerProcess (process.py): a server that is started here, and ends with the run
    linked_model (model_folder.py): a model folder with the run's own stop tokens

They use the standard library alone: the library of a server is in an environment of its own.
"""
