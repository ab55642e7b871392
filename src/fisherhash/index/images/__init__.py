"""Pictures in and out of an index: folders kept in step, questions, duplicates, contact sheets."""
